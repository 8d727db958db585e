"""Uses of a trained network: evaluate, predict, export."""
