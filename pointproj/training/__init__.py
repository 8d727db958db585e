"""The training job: loop, step, losses, checkpoints, validation, report."""
