"""One model in several processes: their group, the calls that all of them make, and checks that it is that model."""
