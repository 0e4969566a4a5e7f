"""Configuration: the YAML groups, and what turns a command line into finished run directories."""
