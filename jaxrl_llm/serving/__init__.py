"""An OpenAI-compatible endpoint: engine, records of the API, HTTP server."""
