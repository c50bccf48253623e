"""View, Scores, Plan: what a method that drops something is shown, and what it says of it."""
