"""What operators see of topics, and what they can do about them."""
