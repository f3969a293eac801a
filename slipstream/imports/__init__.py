"""Hidden-state stores that others made, taken into the work directory: read, measured, checked, adopted."""
