"""The networks and their parts."""
