"""Data sets: files of rows, and the tasks that are made of them. What reads Parquet, and numpy, is imported late."""
