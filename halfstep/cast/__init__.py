"""The dtype of values: op casting, module casting, and emulation of a format that the device lacks."""
