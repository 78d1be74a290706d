"""Frame verification: are picked frames the ones that an arm reports?

For each pick, an output of kind ``frames`` lists the requested frame, the frame that the arm
reports, a digest of the pixels that the arm returned, and a digest of the pixels that the decoder
gives for the reported frame when it decodes the video from the beginning. So even an arm that picks
other frames than the baseline is verified. An arm that picks the same frames is also compared with
the baseline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Outputs = Mapping[str, Any]


def frames_difference(
    reference: Outputs | None, outputs: Outputs, all_alike: bool = False
) -> str | None:
    """Return a phrase on the first error in a case's frames, or None.

    ``reference`` is the baseline's output, or None if the baseline did not serve the case.
    ``outputs`` is compared with the reference if ``all_alike``, or if both arms pick exactly the
    requested positions.
    """
    count = len(outputs["picks"])
    if len(outputs["asked"]) != count:
        return f"{count} frames were returned, but {len(outputs['asked'])} were requested"
    for pick, (requested, picked) in enumerate(
        zip(outputs["asked"], outputs["picks"], strict=True)
    ):
        if requested != picked:
            return f"pick {pick} is frame {picked}, but frame {requested} was requested"
    pairs = zip(outputs["pixels"], outputs["decoder"], strict=True)
    wrong = [pick for pick, (pixels, decoder) in enumerate(pairs) if pixels != decoder]
    if wrong:
        place = outputs["picks"][wrong[0]]
        return (
            f"the pixels of pick {wrong[0]} are not those that the decoder returns for frame "
            f"{place} ({len(wrong)} of {count} picks)"
        )
    if reference is None or not (all_alike or (outputs["wished"] and reference["wished"])):
        return None
    return _against(reference, outputs)


def _against(reference: Outputs, outputs: Outputs) -> str | None:
    if outputs["digest"] == reference["digest"]:
        return None
    if len(outputs["picks"]) != len(reference["picks"]):
        return f"{len(outputs['picks'])} frames, but {len(reference['picks'])} in the baseline"
    pairs = zip(
        zip(outputs["picks"], outputs["pixels"], strict=True),
        zip(reference["picks"], reference["pixels"], strict=True),
        strict=True,
    )
    first = next((pick for pick, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        return "the digests of the outputs differ, but those of all frames agree"
    return f"the pixels first differ at pick {first}, frame {outputs['picks'][first]}"


def verified_shares(outputs: Outputs) -> dict[str, float]:
    """Return 1.0 for each verified pick and 0.0 for every other pick, by the pick's index.

    A pick is verified if it is the requested frame and has the decoder's pixels.
    """
    rows = zip(
        outputs["asked"], outputs["picks"], outputs["pixels"], outputs["decoder"], strict=False
    )
    return {
        str(pick): float(requested == picked and pixels == decoder)
        for pick, (requested, picked, pixels, decoder) in enumerate(rows)
    }
