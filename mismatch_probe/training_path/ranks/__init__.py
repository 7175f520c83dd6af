"""One model held by several processes: their group, what each of them does, and the checks that it is that model."""
