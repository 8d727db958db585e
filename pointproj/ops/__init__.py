"""The library: search and aggregation operators for point clouds, on several backends."""
