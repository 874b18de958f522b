"""One TOML file per model size, and the schema of all."""
