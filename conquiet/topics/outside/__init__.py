"""The door for readers that are no members of a group, such as Spark."""
