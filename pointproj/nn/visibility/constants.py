"""Every number of the visibility network that was tuned by measurement, with its meaning.

Coordinates are those of the query cube [-1, 1]^3. A neighbour is one of a point's nearest samples.
"""

import warp as wp


class Cloud:
    """All samples of a cloud."""

    UNIT = 0.05  # usual distance between samples: about that of 4,096
    PLANE_NEIGHBORS = 24  # neighbours that a plane is fitted to
    EXACT_SHARE = 0.02  # a cloud with a larger share of exact planes has no noise


class LocalPlane:
    """The plane with most neighbours of a point."""

    PAIRED = 10  # each pair of so many neighbours spans a plane that is tried
    NEIGHBORS = 15  # neighbours that can be on it
    EXACT = 0.01  # distance from it in units at which a neighbour's weight is 1 / 2, in clouds without noise
    NOISE_RANK = 5  # rank of the neighbour, by distance from the plane, whose distance gives the noise
    NOISE_OF_RANK = 1.75  # standard deviation of the noise, divided by the distance of that neighbour
    WITHIN = 1.5  # the same distance as EXACT in clouds with noise, in standard deviations
    REFINED = 3  # times that it is fitted to the neighbours on it
    FEW = 0.25  # with a smaller share of neighbours on it, the surface is curved
    FEWEST = 0.05  # with a smaller share of neighbours on it, its direction is arbitrary
    SQUARED = 5  # times that an inverse is squared, until only its largest eigenvalue has a part in it
    FAR = 1e30  # in place of EXACT on curved surfaces: all neighbours have weight 1
    UPWARDS = wp.vec3(0.37, 0.52, 0.77)  # normals point to its side; few planes of made things contain it


class ExactPlane:
    """A plane that contains neighbours of a point, up to the rounding of their coordinates."""

    NEIGHBORS = 32  # neighbours that can be on it
    PAIRED = 12  # each pair of so many neighbours spans a plane that is tried
    CONFIRMED = 4  # least number of neighbours on it, with the two that span it
    ROUNDING = 4e-7  # of a coordinate that was rotated and scaled in single precision
    FARTHEST = 2e-5  # largest distance of a neighbour on it, also if the triangle that spans it is narrow
    NARROWEST = 1e-4  # least height of a triangle that spans it
    SURE = 8  # least number of neighbours on a plane that votes for a direction
    WIDE = 0.03  # least height of the triangle of a plane that votes for a direction
    SAME = 1e-4  # largest sine of the angle between planes of one direction
    VOTES = 4  # least number of votes for a direction
    ON_DIRECTION = 1.5e-6  # largest distance from a plane in a shared direction
    ON_NEIGHBORS = 3e-6  # largest distance from the plane of a neighbour
    SHARED = 2  # least number of neighbours on the plane of a neighbour, which is one of them


class SharedDirection:
    """A direction that many planes of a cloud have."""

    VOTERS = 1024  # points that vote on the directions of their cloud
    COUNT = 16  # directions of a cloud, at most


class FacePlane:
    """A plane of a cloud with noise, propagated over its face; deviations are standard ones of the noise."""

    REFITTED = 3  # times that it is fitted to the neighbours before it is propagated
    WITHIN = 1.2  # distance at which a neighbour's weight is 1 / 4, in deviations
    ROUNDS = 12  # rounds of propagation to neighbours
    LAST_ROUNDS = 2  # of these, the last ones, in which a point may take the plane of a neighbour
    AGREEING = 0.5  # distance between planes at which their agreement is 1 / 4, in deviations
    BENT = 0.25  # sine of the angle between planes at which their agreement is 1 / 4
    NEAR = 1.5  # distance at which a neighbour's plane has 1 / 4 of its weight for a point, in deviations
    FARTHEST = 4.0  # farthest that a point is moved, in deviations

    VOTING = 0.35  # planes vote for directions if a larger share of their neighbours' planes agree with them
    SAME_DIRECTION = 0.05  # largest sine of the angle between planes of one direction
    VOTES = 8  # least number of votes for a direction
    MEANS = 3  # times that a direction is replaced by the mean of the directions near it
    ON_SHARED = 1.2  # distance from a plane in such a direction at which a weight is 1 / 4, in deviations
    NEAR_SHARED = 2.5  # the same for the point itself
    MOVED = 4  # times that such a plane is moved to the neighbours on it
    PREFERRED = 1.7  # factor of the weights on such a plane, compared with the point's own plane

    WHOLE = 2  # times that it is fitted to all samples on it
    SAME = 0.12  # largest sine of the angle to the planes of these samples
    ENOUGH = 20.0  # least sum of the weights of these samples
    FLAT = 1e-7  # added to their variances
    SQUARED = 9  # times that an inverse is squared, until only its largest eigenvalue has a part in it


class Edge:
    """A line at which a disk ends before its radius."""

    COUNT = 3  # most edges of a disk
    COPLANAR = 1e-4  # largest distance of samples from a plane that they are on
    STEEPEST = 0.2  # sine of the least angle between planes that meet at an edge
    NEAR = 0.5  # largest height and distance along the edge of a neighbour across a gap, in radii
    APART = 0.8  # largest cosine between the directions of two edges of a disk


class Disk:
    """The disk around a sample, in the plane of the sample."""

    HOLE_NEIGHBOR = 12  # holes between samples are about as wide as the distance to this neighbour
    LARGEST_HOLE = 1.5  # in means over the cloud: large disks of stray points would slow down every ray
    LARGEST_ON_PLANE = 2.0  # the same for samples with exact planes
    INNER = 0.6  # radius of the small disk, in radii of the large one
    IN_PLANE = 1e-6  # a disk stops no ray from a point closer to its plane than this
    BESIDE = 0.004  # distance from its plane at which rays of its sides start; larger in clouds with noise


class DiskCell:
    """A cell of the grid that lists the disks."""

    SIDE = 32  # most cells along an axis
    OF_DISK = 125  # most cells of a disk
    MARGIN = 1e-4  # of a cell: disks are listed in all cells that rounding can take a ray to


class Ray:
    """A line from a point; it escapes, or a disk stops it."""

    COUNT = 64  # rays of a point
    FEATURES = 4  # shares of rays and of pairs that escape, past the small disks, then past the large disks


class SightLine:
    """A line from a sample to the sensor that saw it."""

    NONE = 1000.0  # distance if there is no line
    NEARLY = 0.25  # distance at which the closeness of a line is 1 / e, in widths of the holes
