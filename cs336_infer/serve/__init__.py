"""The server: OpenAI's HTTP interface over the engine. Needs the extra `serving`."""
