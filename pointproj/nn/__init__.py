"""The networks and what they are made of."""
