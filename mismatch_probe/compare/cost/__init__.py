"""How long a comparison takes and how much memory its processes need: arithmetic, measured rates, earlier runs."""
