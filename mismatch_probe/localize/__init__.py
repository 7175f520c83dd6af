"""Where the two sides of a model part, which place errs in another way than rounding, and what would fix it."""
