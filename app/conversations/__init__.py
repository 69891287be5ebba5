"""The domain: conversations, their ledgers and the runs that extend them. Knows no wire format, no tensors and no database."""
