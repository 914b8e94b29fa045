"""The HTTP server in front of an engine, in its event loop: OpenAI's interface and what is seen
of the pipeline from outside."""
