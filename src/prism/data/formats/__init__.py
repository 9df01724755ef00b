"""The formats on disk: each a reader (and perhaps a writer) behind data.episodes.EpisodeSource."""
