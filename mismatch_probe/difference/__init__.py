"""Two samples of the same measurement are compared: by `diff` for people, by `gate` for limits."""
