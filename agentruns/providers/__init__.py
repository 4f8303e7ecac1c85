"""Model providers: the common protocol (base), Claude, OpenAI and similar servers, and a scripted model."""
