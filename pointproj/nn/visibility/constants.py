"""Every number of the visibility network that was tuned by measurement, and what it is for.

Coordinates are those of the query cube [-1, 1]^3. A neighbour is one of a point's nearest samples.
"""

import warp as wp


class Cloud:
    """All samples of a cloud."""

    UNIT = 0.05  # usual distance between samples: about that of 4,096
    PLANE_NEIGHBORS = 24  # that a plane is fitted to
    EXACT_SHARE = 0.02  # share of samples with exact planes, from which on a cloud has no noise


class LocalPlane:
    """The plane that holds most neighbours of a point."""

    PAIRED = 10  # neighbours of which each pair spans a plane that is tried
    NEIGHBORS = 15  # neighbours that can lie on it
    EXACT = 0.01  # distance from it in units, at which a neighbour counts half; larger in clouds with noise
    NOISE_RANK = 5  # the neighbour, in order of distance from the plane, that tells the noise
    NOISE_OF_RANK = 1.75  # standard deviation of the noise, in distances of that neighbour
    WITHIN = 1.5  # standard deviations of noise: distance at which a neighbour counts half
    REFINED = 3  # times that it is fitted to the neighbours on it
    FEW = 0.25  # share of neighbours on it, below which the surface is curved
    FEWEST = 0.05  # the same, below which its direction means nothing
    SQUARED = 5  # times that an inverse is squared: its largest eigenvalue alone is left
    FAR = 1e30  # distance at which a neighbour counts half where all count the same
    UPWARDS = wp.vec3(0.37, 0.52, 0.77)  # normals lie on its side; few planes of made things contain it


class ExactPlane:
    """A plane that holds neighbours of a point up to the rounding of their coordinates."""

    NEIGHBORS = 32  # neighbours that can lie on it
    PAIRED = 12  # neighbours of which each pair spans a plane that is tried
    CONFIRMED = 4  # neighbours on it that prove it, with those that span it
    ROUNDING = 4e-7  # of a coordinate that was rotated and scaled in single precision
    FARTHEST = 2e-5  # distance from it, however badly it is spanned
    NARROWEST = 1e-4  # height of a triangle that spans it
    SURE = 8  # neighbours on it, from which on it votes for a direction
    WIDE = 0.03  # height of the triangle that spans it, from which on it votes
    SAME = 1e-4  # sine of the angle between planes of one direction
    VOTES = 4  # for a direction
    ON_DIRECTION = 1.5e-6  # distance from a plane of a known direction
    ON_NEIGHBORS = 3e-6  # distance from the plane of a neighbour
    SHARED = 2  # neighbours on such a plane, with the one whose it is


class SharedDirection:
    """A direction that many planes of a cloud have."""

    VOTERS = 1024  # points that vote on the directions of their cloud
    COUNT = 16  # directions of a cloud, at most


class FacePlane:
    """A plane of a cloud with noise, spread over its face. Deviations are standard ones, of the noise."""

    REFITTED = 3  # times that it is fitted to the neighbours, before it is spread
    WITHIN = 1.2  # deviations: distance at which a neighbour counts a quarter
    ROUNDS = 12  # in which it spreads to neighbours
    LAST_ROUNDS = 2  # of these, in which a point may take the plane of a neighbour
    AGREEING = 0.5  # deviations between planes that agree
    BENT = 0.25  # sine of the angle between planes that agree
    NEAR = 1.5  # deviations from a plane that a point may take
    FARTHEST = 4.0  # deviations that a point is moved, at most

    VOTING = 0.35  # share of the neighbours' planes that agree with one that votes for a direction
    SAME_DIRECTION = 0.05  # sine of the angle between planes of one direction
    VOTES = 8  # for a direction
    MEANS = 3  # times that a direction is replaced by the mean of those near it
    ON_SHARED = 1.2  # deviations from a plane in such a direction, at which a neighbour counts a quarter
    NEAR_SHARED = 2.5  # the same for the point itself
    MOVED = 4  # times that such a plane is moved to the neighbours on it
    PREFERRED = 1.7  # weight of a neighbour on it, beside one on the point's own plane

    WHOLE = 2  # times that it is fitted to all samples on it
    SAME = 0.12  # sine of the angle to the planes of these, at most
    ENOUGH = 20.0  # such samples, at least
    FLAT = 1e-7  # added to their variances
    SQUARED = 9  # times that an inverse is squared: its largest eigenvalue alone is left


class Edge:
    """A line at which a disk ends before its radius."""

    COUNT = 3  # edges of a disk, at most
    COPLANAR = 1e-4  # distance of samples from a plane that they are on
    STEEPEST = 0.2  # sine of the least angle between planes that meet at an edge
    NEAR = 0.5  # of a radius: distance from the edge and along it of a neighbour that shows a gap
    APART = 0.8  # cosine between the directions of two edges of a disk, at most


class Disk:
    """The disk in its plane that a sample stands for."""

    HOLE_NEIGHBOR = 12  # holes between samples are about as wide as the distance to this neighbour
    LARGEST_HOLE = 1.5  # in means over the cloud: large disks of stray points would slow down every ray
    LARGEST_ON_PLANE = 2.0  # the same for samples with exact planes
    INNER = 0.6  # radius of the small disk, in radii of the large one
    IN_PLANE = 1e-6  # distance from its plane, below which it hides nothing
    BESIDE = 0.004  # distance from its plane at which its sides look; larger in clouds with noise


class DiskCell:
    """A cell of the grid that lists the disks."""

    SIDE = 32  # cells along the longest axis, at most
    OF_DISK = 125  # cells of a disk, at most
    MARGIN = 1e-4  # of a cell: disks are listed as far as rounding can lead a ray


class Ray:
    """A line from a point, that escapes or is stopped by a disk."""

    COUNT = 64  # rays of a point
    FEATURES = 4  # past the small disks, then the large ones: shares of rays and of pairs that escape


class SightLine:
    """A line from a sample to the sensor that saw it."""

    NONE = 1000.0  # distance where there is no line
    NEARLY = 0.25  # of the holes: a line that passes at this distance counts 1 / e
