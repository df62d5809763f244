"""Training loops as the authors of well-known projects write them, and the lines that several ranks change in them."""
