"""The environment of a run: folders, processes, signals, devices, memory, profiling."""
