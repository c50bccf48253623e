"""A folder of somebody's own images, questions and texts, looked at without being asked, as records and splits."""
