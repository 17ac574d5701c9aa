"""The clients that are measured beside each other, each in processes of its own."""
