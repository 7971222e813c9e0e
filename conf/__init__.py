"""Configuration files: folders mirror the packages, files are choices."""
