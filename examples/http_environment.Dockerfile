# A third party's environment as an image of its own: nothing of rollgym is in it.
#   docker build --file examples/http_environment.Dockerfile --tag guess:local examples
FROM node:20-bookworm-slim
COPY http_environment.mjs /srv/
USER 1000:1000
EXPOSE 9000
CMD ["node", "/srv/http_environment.mjs", "9000", "0.0.0.0"]
