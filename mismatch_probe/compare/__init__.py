"""The comparison: plan, child processes, records, summary."""
