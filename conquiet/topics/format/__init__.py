"""What is written: the fields of an entry, its ID, and which partition it goes to. Pure."""
