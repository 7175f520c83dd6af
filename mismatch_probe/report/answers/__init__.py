"""What each command answers: its headline, tiles, tables, figures and advice, for the screen and for the page."""
