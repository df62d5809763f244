"""What ranks do together: calls of one rank, blocks of all; a failure reaches every rank."""
