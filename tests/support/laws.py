"""Exact stationary covariances of the samplers on Gaussian posteriors, as formulas in NumPy."""

from __future__ import annotations

import numpy as np
from scipy.linalg import solve_discrete_lyapunov

from tests.support.exact_law import fixed_point

RECIPE_FRICTION = 20.0
"""The momentum has this friction in the settings below."""

RECIPE_SETTINGS = {
    "D": lambda theta, r: [[0, 0], [0, RECIPE_FRICTION]],
    "Q": lambda theta, r: [[0, -1], [1, 0]],
    "auxiliaries": ["momentum"],
}
"""These settings of `Recipe` give Euler SGHMC."""


def no_noise(covariance):
    """Noise operator of an exact gradient."""
    return np.zeros_like(covariance)


def langevin_law(H, noise, h, step):
    """L = F L F' + h M + h^2/4 M V(L) M with F = I - h/2 M H, for a diagonal M."""
    M = np.diag(np.broadcast_to(step.block.dynamics.preconditioner.values.get_value(), len(H)))
    F = np.eye(len(H)) - h / 2 * M @ H
    return fixed_point(
        lambda L: F @ L @ F.T + h * M + h**2 / 4 * M @ noise(L) @ M, np.linalg.inv(H)
    )


def hamcmc_law(H, noise, h, step):
    """Covariance without pairs: L = F L F' + h G + h^2/4 G V(L) G, F = I - h/2 G H, G = g D^2.

    With pairs the transition is not affine and the law has no closed form.
    """
    hG = h * np.diag(step.block.dynamics.initial_scale.get_value())
    F = np.eye(len(H)) - hG @ H / 2
    return fixed_point(lambda L: F @ L @ F.T + hG + hG @ noise(L) @ hG / 4, hG)


def osgfs_law(H, noise, D, Sigma):
    """L = (I - DH) L (I - DH)' + D V(L) D' + Sigma."""
    F = np.eye(len(H)) - D @ H
    return fixed_point(lambda L: F @ L @ F.T + D @ noise(L) @ D.T + Sigma, np.linalg.inv(H))


def osgfs_law_of_step(H, noise, h, step):
    """The law for the present matrices of the compiled transitions of a step method."""
    D, S = (shared.get_value() for shared in (step.block.dynamics.drift, step.block.dynamics.root))
    return osgfs_law(H, noise, D, S @ S.T)


def recipe_law(H, noise, h):
    """Euler SGHMC: covariance of the position from that of z = (position, momentum)."""
    d, t = len(H), h / 2
    eye, zero = np.eye(d), np.zeros((d, d))
    T = np.block([[eye, t * eye], [-t * H, (1 - t * RECIPE_FRICTION) * eye]])
    S = np.block([[zero, zero], [zero, 2 * t * RECIPE_FRICTION * eye]])
    B = np.vstack([zero, t * eye])
    start = np.block([[np.linalg.inv(H), zero], [zero, eye]])
    joint = fixed_point(lambda P: T @ P @ T.T + B @ noise(P[:d, :d]) @ B.T + S, start)
    return joint[:d, :d]


def state_law(T, B, Q, noise):
    """P = T P T' + B V(P) B' + Q, solved by iteration over V alone."""
    d = len(T) // 2
    P = solve_discrete_lyapunov(T, Q)
    for _ in range(10_000):
        following = solve_discrete_lyapunov(T, Q + B @ noise(P[:d, :d]) @ B.T)
        if np.allclose(following, P, rtol=1e-13, atol=1e-15 * np.abs(P).max()):
            return following
        P = following
    raise AssertionError("the covariance of the gradient does not converge")


def sghmc_euler_law(H, noise, step_size, friction, noise_estimate=None):
    """Covariance of the position (M = I), V(P) = noise(P); `noise_estimate` is V̂ or None.

    MATH: T = [[I - ηH, (1-α)I], [-ηH, (1-α)I]], B = η [I; I], S = 2 (αI - β̂) η, η = ε², α = εγ,
    β̂ = ηV̂/2, for the velocity in units of distance a transition.
    """
    d, eta, alpha = len(H), step_size**2, friction * step_size
    eye = np.eye(d)
    V = np.zeros((d, d)) if noise_estimate is None else noise_estimate
    T = np.block([[eye - eta * H, (1 - alpha) * eye], [-eta * H, (1 - alpha) * eye]])
    B = eta * np.vstack([eye, eye])
    S = 2 * (alpha * eye - eta * V / 2) * eta
    return state_law(T, B, np.block([[S, S], [S, S]]), noise)[:d, :d]


def baoab_law(H, noise, step_size, friction, noise_estimate=None):
    """The same for BAOAB, with the injected noise (1 - c²)(I - U).

    U has, in the eigenvectors q of V̂, the eigenvalue
    δ² v coth(γδ/2) / (4 - δ² q'Hq).
    """
    d, delta = len(H), step_size
    eye, c = np.eye(d), np.exp(-friction * step_size)
    T = np.block(
        [
            [eye - delta**2 / 2 * (1 + c) * H, delta / 2 * (1 + c) * eye],
            [-c * delta * H, c * eye],
        ]
    )
    B = -np.vstack([delta**2 / 2 * (1 + c) * eye, c * delta * eye])
    injected = (1 - c**2) * eye
    if noise_estimate is not None:
        values, vectors = np.linalg.eigh(noise_estimate)
        curvature = np.einsum("ji,jk,ki->i", vectors, H, vectors)
        share = delta**2 * values * (1 + c) / (1 - c) / (4 - delta**2 * curvature)
        injected = (1 - c**2) * (vectors * (1 - share)) @ vectors.T
    Q = np.kron([[delta**2 / 4, delta / 2], [delta / 2, 1.0]], injected)
    return state_law(T, B, Q, noise)[:d, :d]
