"""What a run is: frozen settings, read from files and flags."""
