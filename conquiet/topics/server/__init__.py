"""What Redis holds of topics and groups, as typed calls and typed answers."""
