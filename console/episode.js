// The portable episode: what a file has to hold, and its first steps.

/**
 * Read a portable episode that has begun.
 * @throws {Error} the text is none
 */
export function readEpisode(text) {
  let episode;
  try {
    episode = JSON.parse(text);
  } catch (error) {
    throw new Error(`the file is not JSON: ${error.message}`);
  }
  if (episode === null || typeof episode !== "object" || typeof episode.env_id !== "string") {
    throw new Error(
      "the file is not a portable episode (“Download the episode” and roll-env play --save give one)",
    );
  }
  if (episode.format !== 1)
    throw new Error(`the episode has format ${episode.format}; this console reads format 1`);
  if (!Array.isArray(episode.actions) || !Array.isArray(episode.digests)) {
    throw new Error("the episode has no lists of actions and digests");
  }
  if (episode.actions.length !== episode.digests.length) {
    throw new Error(`${episode.digests.length} digests came for ${episode.actions.length} actions`);
  }
  if (episode.seed === null || episode.seed === undefined) {
    throw new Error("its session was never reset, so there is nothing to replay");
  }
  return { kwargs: {}, options: null, reseeds: [], ...episode };
}

/** The episode as it was after its first steps. */
export function firstSteps(episode, count) {
  return {
    ...episode,
    actions: episode.actions.slice(0, count),
    digests: episode.digests.slice(0, count),
    reseeds: episode.reseeds.filter(([step]) => step <= count),
  };
}

/** A name for the file of an episode. */
export function fileName(episode) {
  return `${episode.env_id}-seed${episode.seed}-${episode.actions.length}steps.json`;
}
