"""Where a number came from: versions, hardware, git state, and keys of the content that made it."""
