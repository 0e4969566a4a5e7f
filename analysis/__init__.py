"""From finished runs to numbers, tables and pictures; nothing here takes part in a run."""
