"""How the ranks are started, find each other, are connected, and know who is dead."""
