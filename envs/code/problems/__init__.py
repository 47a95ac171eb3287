"""Problems of our own, so that everything works without a download: each is a reference solution and its inputs."""
