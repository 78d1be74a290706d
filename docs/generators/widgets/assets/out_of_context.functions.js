// labkit.workload.video.clip_synthesis.Event.visible
function eventVisible(event, picks) {
  const distinct = [...new Set(picks)];
  const before = distinct.filter((pick) => event.start <= pick && pick < event.frame).length;
  const after = distinct.filter((pick) => event.frame <= pick && pick < event.end).length;
  return Math.min(before, after) >= event.needs;
}

// labkit.workload.video.clip_synthesis.scenes, the scene of one frame
function sceneOf(clip, number, colours) {
  const { width, size } = clip, room = width - size;
  const passed = (kind, frame) => clip.frames[kind].filter((event) => event <= frame).length;
  let travelled = 0;
  for (let frame = 1; frame <= number; frame++) travelled += passed("direction change", frame) % 2 ? -2 : 2;
  const apart = Math.min(width, ...clip.frames.collision.map((hit) => Math.abs(number - hit)));
  return {
    disc: (3 * number) % room,
    colour: passed("colour change", number) % colours,
    square: ((travelled % room) + room) % room,
    gap: Math.floor(Math.min(3 * apart, width - 2 * size - 2) / 2),
  };
}
