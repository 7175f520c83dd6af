"""A grid of training runs, cell after cell, and one record of what came of them."""
