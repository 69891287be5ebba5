"""One adapter per public protocol: wire messages to conversation calls, run events to wire messages. No rules of their own."""
