"""Hocket's web side: sockets, protocols, conversations, the durable log. Pure asyncio; never imports torch."""
