"""What is done with a trained network: evaluate, predict, export."""
