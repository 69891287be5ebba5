"""Hocket's inference engine: paged KV, continuous batching, sampling. Knows no web and never imports `app`."""
