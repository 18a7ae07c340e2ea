"""The adapters to torch: one small shared object for each minor version, and their source."""
