"""What a run needs from its machine: folders, processes, signals, devices, memory, profiling."""
