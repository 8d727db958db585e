"""The networks, what they are made of, and which one a config describes."""
