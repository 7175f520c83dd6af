"""Guards in the loops of other trainers, one file each; docs/adapters.md says how to switch them on."""
