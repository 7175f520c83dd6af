"""Two samples of the same measurement set against each other: by `diff` for people, by `gate` for limits."""
